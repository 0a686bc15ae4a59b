"""Every picture of the course.

First  charts              what each rank does when, what fills its memory when, and the curves
       pipeline            schedules
       balance             loads of experts and of ranks
       experts             where tokens go
       precision           what a format can say, what a narrow sum loses
       low_bits            whom an outlier takes its scale from, which codes are used
       recompute           what is held and what runs again, action by action
       memory              copies on links, memory with and without, what bytes cost in time
       address_space       where every block of memory lies, and the holes
       checkpoints         what an interval wastes, a save beside training, who keeps whose state
beside style               one palette named by meaning, one style
       controls            sliders and menus above a picture that follows them
       pipeline_widget     drag a schedule's sizes and costs
       recompute_widget    drag a chain's length and what may be held
"""
