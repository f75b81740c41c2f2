"""Planning beside training: windows are planned in the background, shared out over the ranks.

rows.py        the rows one rank sends, counted from the routes it replays; all ranks' rows as one LoadMatrix
background.py  BackgroundPlanner: exchange rows, plan shares, assemble, compare digests, one window after another
worker.py      PlanWorker: the planning process, which holds numba so that training processes need not
server.py      PlanServer: what runs in that process; the only file here that imports the planner
course.py      Course: whether planning pays on this machine, from what windows promised and took
report.py      what a plan promised for one window and what the window moved
"""
