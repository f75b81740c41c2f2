"""The main job: RL post-training of an MoE model, from rollout to update, balanced by foresight. Read `train.py` first.

    train.py        the loop: sync, rollout, announce, reward, recompute, update, metrics
    config.py       every setting (`config_file.py`: from TOML and --set, `presets/`: ready-made ones)
    task.py         questions and rewards; tokens.py, their tokenizer
    model.py        a HF checkpoint, or a random model of five families
    layout.py       ranks, EP groups, owners of the same experts, the declared cluster
    warmup.py       supervised steps before the first rollout
    rollout.py      our own engine: a whole copy that samples and records its routes; sample.py, what it gives
    outside.py      rollouts from a folder, or from an engine's HTTP face
    batch.py        samples packed without padding as they end, into micro-batches and windows
    grpo.py         advantages and the loss
    learner.py      the model being trained: experts on every rank, at owners, or as planned
    stages.py       recompute and update, replay and arrival checked
    sync.py         canonical weights to the rollout copy, proved by fingerprint.py
    metrics.py      one line per step; clock.py, seconds by stage
    sinks.py        where the lines go: JSONL, TensorBoard, W&B
    checkpoint.py   whole or not there; lock.py, one run at a time in a folder
    run.py          a whole run on one rank
    compare.py      the proof that training is unchanged
    kernels.py      the planning process, started early
    launch.py       local ranks, or those of torchrun (environment.py); events.py, what they tell
    preflight.py    what is wrong with a run, before anything is made
    forecast.py     memory and a plan before anything starts

May import balancer, adapters.transformers, routes, loads and below; torch and transformers. Only `cli` imports it.
"""
