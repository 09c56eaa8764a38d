"""The SSA graph of a step, its index and text, rewriting helpers, and the contract of planner and lowering."""
