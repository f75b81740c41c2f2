"""One file per framework: find its MoE layers, put balanced experts in their place, take them out again.

    protocol.py      Adapter: the face all adapters share; MicroBatch, and routes and schedules from it
    replay.py        Turn: a forward's name and routes, travelling with its data; Recorded; counters
    shards.py        experts cut to their owners and gathered again
    transformers.py  the adapter of Hugging Face transformers: install, uninstall, checkpoints
        transformers_model.py     inspect: what is there, what is unsupported
        transformers_families.py  names, layouts and gates of each family; add one here
        transformers_routers.py   hooks: record, replay, and how a turn reaches its layers

May import balancer, runtime, routes and core, and the one framework a file is named after; never another adapter.
"""
