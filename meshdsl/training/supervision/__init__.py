"""Processes that are started again when one fails, on one machine and several: ``meshdsl train --restarts``.

Modules in order:

    contingency  plans for fewer processes, made in advance
    processes    the processes of a launch on this machine
    hosts        the supervisors of several machines, which meet in the folder of the run
    crew         the processes of a launch on all machines
    progress     whether a run makes progress, seen from outside
    members      which processes go on after a fault
    leader       the decisions of a supervised run
    follower     a machine that does as the leader says
    supervisor   a machine leads or follows, until the run is over
"""
