"""A run seen from outside: its metrics, where its time goes, and what happened to it. Modules in order:

metrics     metrics.jsonl, spikes of the loss, and the curves
step_times  where the time of steps goes, and which process takes longest
trackers    TensorBoard, Weights & Biases
profile     a trace of some steps
events      events.jsonl, and what every fault cost
"""
