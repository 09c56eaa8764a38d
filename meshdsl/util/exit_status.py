"""Exit statuses of the commands; ``docs/reference/cli.md`` has the table of them."""

from signal import SIGTERM

CHANGED, BAD_INPUT, INFEASIBLE, DIFFERENT_PROGRAM, NON_FINITE = 1, 2, 3, 4, 5
PEER_ENDED = 69  # another process of the run ended; EX_UNAVAILABLE of sysexits.h
OWN_FAULT = 70  # EX_SOFTWARE of sysexits.h
LOST = 75  # a run whose folder was taken; EX_TEMPFAIL of sysexits.h
CLOSED_PIPE = 141  # 128 + SIGPIPE, as of a program that the signal ends
STOPPED = 128 + SIGTERM  # a run that received the signal, saved and ended
