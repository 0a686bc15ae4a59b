"""Pipeline parallelism: schedules as data, run by one interpreter, simulated and drawn from the same lists."""
