"""The layers of a model over ranks: schedules as data, run by one interpreter, simulated and drawn.

Page   first               the technique on 80 lines of plain torch
First  schedule            a schedule is a list for each rank; what makes one right
       schedules/          the published ones; schedules_by_name, what a Strategy calls them
       simulate            when everything happens: makespan, idle time, bubble share, overhead
then   lower, runtime      messages put in; the interpreter on real ranks
       deferred            a backward in two halves, dx now and dW later
       partition           where to cut a model into stages
"""
