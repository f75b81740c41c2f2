"""Execute a plan in training, on torch.distributed: rows go where the plan says, gradients come home.

The layer, in the order in which a row meets it:

    experts.py       BalancedExperts: the routed experts of one layer; the story of a forward
    window.py        Window: one plan as one rank executes it
    home.py          op: home weights enter, replica gradients come home
    assign.py        assign_slots: which slot computes each row, the seam between plan and dispatcher
    dispatch.py      Dispatch: the way of every row, exchanged or prepared ahead
    spread.py        op: tokens to rows
    exchange.py      op: rows to other ranks and back
    reorder.py       op: received rows slot by slot, and back
    expert_block.py  op: the experts' products over home and replica slots; activation.py between them
    combine.py       op: rows to tokens, added in the order given
    fused.py         Triton kernels for combine and activation on a CUDA device; kernels.py chooses
    row_bits.py      the start-up check of the deterministic mode
    reference.py     the same layer densely, in one process: the specification

What moves experts is behind `bank.ReplicaBank`.

May import torch and core; never planner, routes or any framework: planner and runtime share only `core.Plan`.
"""
