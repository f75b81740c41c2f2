"""RL post-training of an MoE model, from rollout to update, balanced by foresight. Read `train.py` first.

train.py        the loop (sync, rollout, announce, reward, recompute, update, metrics) and a whole run on one rank
config.py       every setting, from `presets/`, TOML and --set
task.py         questions, rewards and tokenizers
model.py        a HF checkpoint, or a random model of five families
rollout.py      samples with their routes: our own sampling, recorded ones, or an engine's over HTTP
learner.py      the model being trained: warm-up, optimizer, weight sync with fingerprints
stages.py       recompute and update: packing, GRPO, replay and arrival checked
checkpoint.py   checkpoints that any number of ranks resumes; one run at a time in a folder
metrics.py      events, one line of metrics per step, and where the lines go
compare.py      the proof that training is unchanged
preflight.py    errors found and memory forecast before anything starts
"""
