"""Reading compiled programs from their HLO text.

parse          instructions, types, calls, trip counts, and how often each instruction runs
collectives    kind, mesh axes and bytes of every collective
source         the user's line of every instruction
flops          FLOPs and seconds of matrix products and convolutions
schedule       which products run beside each collective
dedup          value numbering of programs that are lowered but not compiled
"""
