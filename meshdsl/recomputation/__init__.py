"""Recomputation: less memory for residuals, more work in the backward pass.

Problem. What the backward pass reads of the forward pass (a residual) is held from one to the other. A residual may as
well be computed again from what is held, when it is needed. Which ones, so that the step fits and is fast?

Method. At a price of memory this is a minimum cut: Chen et al. 2016 ("Training deep nets with sublinear memory cost")
keep the values between segments of a network, and Jain et al. 2020 ("Checkmate") show that which values are kept is a
choice of its own for each. Modules, in order:

    levels      where forward and backward pass meet; loops over layers; what can run twice
    rewrite     the program in which given operations run twice
    segments    where chains of recomputation end in unrolled layers
    min_cut     the cheapest operations to run twice, at a price of memory
    traffic     which residuals cost memory traffic, so that to recompute them is faster
    hosting     the program in which given residuals wait in the host's memory
    loop_parts  loops over layers divided in two, so that the first iterations may follow another choice

Nothing is planned here: ``api.remat`` prices residuals by a plan, plans the rewritten programs within the limit, and
takes the fastest. The rewritten program is an ordinary program: rules, planner, lowering and ``verify`` know nothing of
recomputation, but for barriers that one compiler would drop (``lowering/keep_collectives.py``).
"""

from meshdsl.recomputation.rewrite import recomputing

__all__ = ["recomputing"]
