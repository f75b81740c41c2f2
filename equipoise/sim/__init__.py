"""Replay of a plan over loads on a described cluster, without a GPU. Not built yet.

May import core, loads, cost and planner; never torch, routes or runtime.
"""
