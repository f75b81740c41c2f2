"""Execute a plan in training, on torch.distributed: rows go where the plan says, gradients come home.

The layer, in the order in which a row meets it:

    experts.py       BalancedExperts: the routed experts of one layer; the story of a forward
    window.py        Window: one plan as one rank executes it
    home.py          op: home weights enter, replica gradients come home
    assign.py        assign_slots: which slot computes each row, the seam between plan and dispatcher
    dispatch.py      Dispatch: the way of every row; ordering.py sorts
    prepared.py      PreparedDispatch: one made ahead, from a plan that knows every route; upload.py brings it
    spread.py        op: tokens to rows
    exchange.py      op: rows to other ranks and back
    two_level.py     op: tokens to rows at other ranks, across to each node once; relay.py, its tables
    reorder.py       op: received rows slot by slot, and back
    expert_block.py  op: the experts' products over home and replica slots; activation.py between them
    combine.py       op: rows to tokens, added in the order given
    fused.py         Triton kernels for combine and activation on a CUDA device; kernels.py chooses
    row_bits.py      the start-up check of the deterministic mode
    traffic.py       rows that arrived, bytes that were sent
    reference.py     the same layer densely, in one process: the specification

For the optimizer and beyond it: norm.py, the gradient norm in logical order; state.py, experts and their optimizer
state under names that no number of ranks changes.

What moves experts is behind `bank.ReplicaBank` and `still.Mover`:

    engine.py        TransferEngine: windows and versions; the story of a transfer
    edges.py         publish to homes, collect to owners; relocate.py moves experts between slots
    puller.py        fills replica buffers ahead, along itinerary_walk.py, by paths.py
    copies.py        several copies in one go; copy_kernel.py, inside a CUDA device
    shift.py         moves later pulls to the other path where one falls behind
    host_store.py    all experts in host memory, with versions; refresher.py writes what will be pulled
    crossing.py      brings it from other nodes, in recompute
    returns.py       replica gradients on their way home
    arena.py         replica slots apart from the homes, or in one tensor with them
    node.py          NodeMemory: what the ranks of a node share; layout.py, its sizes
    pages.py         memory that processes map; cuda_pages.py on CUDA devices
    node_pages.py    shares it in a node, as memory.py does plain memory; handover.py passes descriptors
    connection.py    what ranks agree on and what crosses nodes, apart from the training's group
    streams.py       points in a device's work; watchdog.py bounds every wait; counters.py counts

May import torch and core; never planner, routes or any framework: planner and runtime share only `core.Plan`.
"""
