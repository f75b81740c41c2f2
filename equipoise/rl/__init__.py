"""The main job: RL post-training of an MoE model, from rollout to update, balanced by foresight.

May import balancer, adapters.transformers, routes, loads and below; torch and transformers.
"""
