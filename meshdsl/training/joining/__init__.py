"""The processes of a run find each other before they train, and end together. Modules in order:

launchers   variables of SLURM, MPI, torchrun, Kubernetes, TPUs: how many processes there are, and where they meet
rendezvous  processes meet before jax joins them, and end together
multihost   joining the other processes
agreement   what all processes have in common, compared before anything is compiled
"""
