"""One file per framework: find its MoE layers, put balanced experts in their place, take them out again.

May import balancer, runtime, routes and core, and the one framework a file is named after; never another adapter.
"""
