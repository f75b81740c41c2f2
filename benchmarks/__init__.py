"""Benchmarks, run one by one from the project's root: `python -m benchmarks.<name>`.

results.py       the table, the JSON line, and the facts about machine and commit that go with them
counting.py      counting routes against one np.bincount call
planner.py       quality and speed of the planner against every policy (planner_rows.py, planner_speed.py, traces.py)
analyze.py       time of equipoise analyze from the native store
coverage.py      plans from incomplete or old routes, priced with the rows that really come
derive_profile.py  profiles of devices that were not measured, from one that was
rank_replay.py   an expert-parallel step, every rank's own work run on one GPU (replay_work.py, replay_chain.py)
validate.py      predictions beside what rank_replay measured
layer.py         the balanced layer beside a plain one, on a GPU (plain_layer.py)
transfer.py      pull rates of the engine's paths and the memory of replica buffers, on a GPU
pulls.py         pulls beside a stack of layers, on a GPU (decoder_stack.py; turns.py times in turn)
memory.py        the forecast of a plan's memory beside what torch allocates, on a GPU
store_memory.py  memory of counting a large native store
"""
