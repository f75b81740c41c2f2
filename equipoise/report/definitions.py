"""Every word the page uses, defined once, in the words of the glossary (`equipoise/core/__init__.py`).

Knows words alone. A chart names the words its reader needs; the page shows them one click away, and all at its end.
"""

DEFINITIONS = {
    "row": "One token-assignment, as a matrix product sees it: T tokens with top-k experts make T x k rows.",
    "load": "A number of rows. A rank's load is the rows it receives from all ranks, padding included.",
    "skew": "Busiest rank over mean rank, in rows, of one layer in one micro-step; 1.00 is level. Micro-steps, layers "
    "and groups are never added up before the ratio is taken.",
    "rank": "A process with one device. A node is a group of ranks with a fast interconnect.",
    "expert": "A logical routed expert of one layer.",
    "micro-step": "One forward (and, in the update, backward) over a micro-batch on all ranks.",
    "stage": "recompute (old log-probabilities, forward only) or update (forward and backward). Stages are priced and "
    "measured apart.",
    "window": "A run of micro-steps between two weight versions: the recompute stage, or a mini-batch of the update. "
    "Homes are chosen once per window.",
    "owner": "The rank that keeps an expert for good: parameter, optimizer state, checkpoint. Contiguous, as in static "
    "expert parallelism.",
    "home": "The rank where an expert computes during a window. An expert whose home is not its owner is displaced.",
    "replica": "A copy of an expert on another rank of the node, alive for one micro-step of one layer. It takes a "
    "part of the expert's rows.",
    "slot": "A place on a rank that holds one expert. Replica slots are the memory that a plan may use.",
    "before": "Every expert at its owner, as in static expert parallelism.",
    "after": "With the plan: homes, replicas and split rows.",
    "balanced": "The ceiling: the same rows at the same sources, dealt out evenly over ranks at no cost.",
    "lost": "Now minus balanced: what perfect balance would give back.",
    "saved": "Now minus planned, every cost of the plan charged.",
    "compute": "Expert layers on the busiest rank, summed over layers and micro-steps.",
    "all-to-all": "Sending rows to their experts and back, by the busiest link.",
    "pull": "Copying an expert's weights from its home to a replica slot.",
    "return": "Adding a replica's weight gradient to its home.",
    "publish": "Copying weights from owners to homes, layer by layer from the start of a window on.",
    "collect": "Handing accumulated gradients from homes to owners, each layer after its last turn in a window.",
    "transfers": "Pull, return, publish and collect, as far as nothing hides them.",
    "exposed": "Seconds of a transfer that computation does not hide; the step is longer by them.",
    "hidden": "Seconds of a transfer that run beside computation and do not make the step longer.",
    "bubble": "Seconds a pipeline stage waits for another one.",
    "static": "Contiguous expert parallelism, nothing moved.",
    "eplb-history": "EPLB's placement from the window before, with the same number of replica slots.",
    "eplb-oracle": "EPLB's placement from this window's own loads, with the same number of replica slots.",
    "lplb": "A linear program splits rows over fixed replicas, micro-step by micro-step.",
    "reactive": "The same micro plan on contiguous homes, known only after the router has run, and charged for it.",
    "equipoise": "This project's plan, with every cost charged.",
    "break-even": "Where what a plan saves equals what it costs. Beyond it a plan pays.",
    "predicted": "Computed from the loads and a hardware profile; nothing was run.",
    "measured": "Timed while it ran.",
    "received rows": "Memory that arriving rows need while their layer computes, on the rank that receives most.",
    "coverage": "Share of forwarded tokens whose experts are known before the step.",
    "reward": "Mean reward of the step's samples, as the task gives it.",
}
