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
    "balanced": "Even ranks, to measure by: the same rows at the same sources, dealt out evenly over ranks at no cost. "
    "A plan can take less time than this, where its rows stay nearer or fewer of its slots have rows.",
    "lost": "Now minus balanced: what even ranks would give back. Nothing where balanced takes longer than now.",
    "saved": "Now minus planned, every cost of the plan charged.",
    "compute": "Expert layers: of the busiest rank, summed over layers and micro-steps, where seconds are of a step; "
    "of each rank where ranks are shown. A timeline draws attention in the same lane, in its own colour.",
    "all-to-all": "Sending rows to their experts and back, by the busiest link.",
    "all-to-all inside": "Exchanges whose busiest link is inside a node.",
    "all-to-all across": "Exchanges whose busiest link crosses nodes.",
    "attention": "Attention, shared experts and spreading tokens to rows, of the rank with most tokens where seconds "
    "are of a step.",
    "planning": "Making plans where training waits for them: before a window, or in every layer where a policy plans "
    "after the router has run.",
    "rollout": "Generating samples; of a simulation as given.",
    "other": "Seconds as given: optimizer, head, anything else that balance does not touch.",
    "waiting": "A rank's time without work: it waits for the busiest rank, for transfers that nothing hides, and for "
    "the plan of a window.",
    "pull": "Copying an expert's weights from its home to a replica slot.",
    "return": "Adding a replica's weight gradient to its home.",
    "publish": "Copying weights from owners to homes, layer by layer from the start of a window on.",
    "collect": "Handing accumulated gradients from homes to owners, each layer after its last turn in a window.",
    "edges": "Publish and collect together. Of a rank's seconds also planning, and weights that reactive pushes.",
    "peer": "The path of pulls from the memory of another rank of the node.",
    "host": "The path of pulls from the node's host memory.",
    "transfers": "Pull, return, publish and collect, as far as nothing hides them.",
    "moved": "Seconds that transfers would take with nothing to wait for, hidden or not: the busiest rank's of every "
    "layer, added up.",
    "exposed": "Seconds of a transfer that computation does not hide; the step is longer by them.",
    "hidden": "Seconds of a transfer that run beside computation and do not make the step longer.",
    "bubble": "Seconds a pipeline stage waits for another one.",
    "static": "Contiguous expert parallelism, nothing moved.",
    "eplb-history": "EPLB's placement from loads that are known earlier, with the same number of replica slots: those "
    "of an earlier step where they were given, else the first half of each window's own micro-steps.",
    "eplb-oracle": "EPLB's placement from this window's own loads, with the same number of replica slots.",
    "lplb": "A linear program splits rows over fixed replicas, micro-step by micro-step.",
    "reactive": "The same micro plan on contiguous homes, known only after the router has run, and charged for it.",
    "equipoise": "This project's plan, with every cost charged.",
    "break-even": "The least tokens per rank from which on a plan saves at least the share that the dashed line shows, "
    "and does so at every larger number tried.",
    "predicted": "Computed from the loads and a hardware profile; nothing was run.",
    "measured": "Timed while it ran.",
    "received rows": "Memory of arriving rows and of what the expert block makes of them, on each rank at its worst "
    "moment. Where activations are kept for the backward pass, those of all layers of a micro-step count.",
    "coverage": "Share of forwarded tokens whose experts are known before the step.",
    "reward": "Mean reward of the step's samples, as the task gives it.",
}
