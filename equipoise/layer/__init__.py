"""The balanced layer: what happens to a row, from a token to the expert that computes it and back.

In the order in which a row meets them:

    experts.py       BalancedExperts, the routed experts of one layer; the story of a forward pass
    dispatch.py      which slot computes each row, and the index tables that take it there and back
    relay.py         the two-level exchange: a token crosses to each node once, then goes on inside the node
    mapped.py        inside a node: rows are read where they are, through mapped memory; triton_rows.py has its kernels
    ops.py           the autograd ops: enter home, spread, exchange, reorder, combine
    expert_block.py  the experts' products over home and replica slots, and the activations between them
    waves.py         exchange and products wave by wave: the experts of one compute while rows of another travel
    triton_ops.py    Triton kernels of combine and activation, for CUDA devices
    checkpoint.py    experts and optimizer state under names that no number of ranks changes; the gradient norm

This room imports torch, `core` and `transfer`. It never imports the planner: both share only `core.Plan`.
"""
