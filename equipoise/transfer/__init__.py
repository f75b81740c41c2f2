"""Transfers: what happens to an expert's weights and gradients while a plan is executed.

    engine.py         TransferEngine: windows and versions; publishes and collects layers, the story of a transfer
    edges.py          publish to homes and collect to owners: moves experts between slots, all or none
    pulls.py          fills replica buffers ahead of the visits that use them; triton_copies.py is a kernel for that
    returns.py        replica gradients on their way home
    mapped_rows.py    memory in which a node's ranks show rows to each other, and the order of reading it
    host_store.py     all experts in host memory, with versions, and what refreshes it
    node.py           ExpertWeights, and the memory that the ranks of a node share for them
    pages.py          memory that several processes map; cuda_pages.py is the same on CUDA devices
    waits.py          watchdog, streams, counters, and agreement between ranks: `OwnGroup`, `RankAgreement`
    nccl.py           experts of CUDA devices between nodes

This room imports torch and `core`, never the planner, routes or a framework.
"""
