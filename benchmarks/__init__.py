"""Benchmarks, run one by one from the project's root: `python -m benchmarks.<name>`.

results.py       the table, the JSON line, and the facts about machine and commit that go with them
counting.py      counting routes against one np.bincount call
store_memory.py  memory of counting a large native store
"""
