"""Real Megatron-Core on four CPU ranks: `shims` let it run, `model` builds and trains it, `work` has the tasks."""
