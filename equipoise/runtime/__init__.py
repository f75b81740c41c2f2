"""Execute a plan in training, on torch.distributed: rows go where the plan says, gradients come home.

May import torch and core; never planner, routes or any framework: planner and runtime share only `core.Plan`.
"""
