"""Results to the terminal, to JSON and to one HTML file. Not built yet.

May import core, loads, sim and planner's result types; never torch.
"""
