"""One adapter per framework: find its MoE layers, replace their experts by balanced ones, and restore them.

    protocol.py      what adapters share: their face, replay, micro-batches, experts cut to their owners
    transformers.py  Hugging Face transformers: install, uninstall, checkpoints
        transformers_model.py     inspect: what is there and what is unsupported; add a model family here
        transformers_routers.py   hooks that record and replay routes
        transformers_sharded.py   a model that transformers itself has sharded: install, windows, uninstall
    megatron.py      Megatron-Core: install, windows around its schedules, uninstall
        megatron_model.py         inspect: what is there and what is refused
        slime.py                  hooks for slime and miles, which train with it
    torchtitan.py    torchtitan: inspect, install, windows, uninstall
    hooks.py         hooks that carry a forward pass to its layers; windows over working copies of sharded experts
    wrappers.py      DDP and FSDP2 around a model: what they must leave alone, what they average

An adapter imports the one framework it is named after, and never another adapter; hooks of a trainer import the adapter
of what it trains with.
"""
