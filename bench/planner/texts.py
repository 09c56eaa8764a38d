"""The prose of `[planner](planner.md)`: what stands before the tables of each section."""

SHORT = "Plans of one model of every family, proofs of how far from the optimum they can be, and other ways to choose."

INTRO = """# The planner, measured

Written by `make bench-planner`. One model of every family in `models/` on meshes of one, two and three axes, topology
`dgx-h100`, the batch split over `data`, everything else left open, memory unlimited. Planning seconds are processor
seconds after tracing, in a process that has planned before; where two threads run, both count. Every collective is sent
by itself here; gaps of plans that send small ones as one are in [effort](effort.md).

## How plans are proved

The problem is stated in `meshdsl/planner/__init__.py`. `meshdsl/planner/solve.py` runs these stages in order.

1. **Costs** (`meshdsl/planner/costs/`). A roofline time per operation and joint signature; all-pairs resharding costs
   per shape (Bellman-Ford over the graph of layouts); the cost of a value with several consumers is a minimum Steiner
   tree over the layouts they need (Dreyfus and Wagner 1971). Costs are fixed-point integers held in float64, compared
   lexicographically: seconds, then collectives, then reshard steps. Sums are exact and ties are broken the same way on
   every machine.
2. **Encoding** (`meshdsl/planner/encoding/`). The problem becomes two pairwise cost networks: `plans` restricts
   resharding trees and so gives a cost that can be paid (an upper bound); `bounds` relaxes them (a lower bound). Where
   the consumers of a value can ask for few sets of layouts, both are exact.
3. **Messages** (`meshdsl/planner/mrf/trws.py`). TRW-S (Kolmogorov 2006) raises the bound, and its messages decode to an
   assignment, which is the first plan. This alone certifies every plan with a `plan.lower_bound`.
4. **Closing the gap** (`meshdsl/planner/bounds/tighten.py`, `meshdsl/planner/search/local_search.py`). On steps of up
   to a few thousand operations, rounds follow: states whose min-marginal exceeds the incumbent are pruned, values whose
   resharding was underestimated in the last decoded plan get larger (finally exact) tables or, where these are too
   large, their most expensive pairs of consumers; the decoded plans are evaluated. Rounds end when bound and plan meet,
   when they stop helping, or when a fixed number of table entries has been touched. A gap of 0 below means less than
   1e-8, since costs are summed in floating point. On larger steps no states are pruned, but underestimated values
   (weights that every microbatch reads, say) still get larger tables while more than 0.5% is open.
5. **Search** (`meshdsl/planner/search/`). While more than 0.5% is open: large-neighbourhood search (Shaw 1998), which
   fixes a random part of the operations and solves the rest exactly, and coordinate descent over mesh axes, so that a
   mesh with more axes is never planned worse than one with fewer.
6. **Memory** (`meshdsl/planner/memory/`, `meshdsl/planner/liveness/`). If the plan does not fit, program points that
   exceed the limit get a shadow price per byte, raised until a plan fits and, on steps of up to 20,000 operations,
   lowered as far as one still does (`fit.py`). Two plans, one feasible and one cheaper but infeasible, are then split
   into independent differences, each with a saving and a demand of bytes at the fullest points; a knapsack chooses
   which to adopt (`combine.py`). Where the limit costs much, large-neighbourhood search continues within it, and steps
   of up to 150 operations are solved by branch and bound, which proves the plan optimal or reports the least possible
   memory (`branch_and_bound.py`).
7. **The bound within memory** (`meshdsl/planner/memory/dual.py`). Lagrangian duality: no feasible plan costs less than
   the minimum over all plans of cost plus priced bytes, minus the price of the limit. The priced bytes are a lower
   bound on live memory (`lower_bound.py`): while an operation runs, memory holds its operands and results, the operands
   of fused operations that run later, and, of every value that was produced before and is read again, some copy on the
   way to that use. So keeping a gathered weight for the backward pass and gathering it again are both priced, also
   where three loops of a pipeline read it. Known plans, feasible or not, tell which price gives the best bound
   (Kelley's cutting planes). On steps of more than 8,000 operations this starts in a second thread during stage 6, at
   the price known by then, and is repeated if the final plan suggests another price.
8. **Ties** (`meshdsl/planner/search/tie_break.py`). Among plans of equal cost, on steps of up to 8,000 operations, one
   with fewer distinct layouts is preferred, as far as local changes find it.
"""
GAPS = """
![gaps](planner-gaps.svg)
"""
CHECK = """
## Checked by another solver

The whole one-axis problem as an integer program (`tests/planner/integer.py`), without our networks, eliminations or
messages: a binary per operation and joint signature, a flow per consumer of a value, an edge of the layout graph paid
once however many flows use it. HiGHS solves it. Cost and bound are given as multiples of our plan's cost; the tests
compare smaller steps, on two axes as well.
"""
PEERS = """
## Against how others choose

Each method runs on our tables of costs and reshards and is evaluated like ours (`bench/planner/peers.py`); only the
choice differs.

* **greedy**: operations in program order take the signature that is cheapest given the layouts of their operands (the
  rule of OneFlow's compiler); unpinned arguments are replicated, and so are constants if that is cheaper.
* **one name, one axis**: every named dim is split over one axis or none, wherever it occurs (Mesh-TensorFlow's
  `auto_mtf`); all assignments of the names with most bytes are tried.
* **axis by axis**: an integer program per mesh axis with the previous axes fixed, in which every consumer pays for its
  own reshard (after Alpa's solver, which does not share them).

Their predicted time as a multiple of ours, and the bytes one device sends.
"""
STEPS = """
## Run beside how others choose

The same choices at small sizes (those of `bench/memory.py`) on 8 virtual CPU devices, `data=4,model=2`, the batch split
over `data`, cost constants measured by `calibrate` in the same process (`bench/planner/steps.py`). The XLA partitioner
(Shardy) gets the same input and output shardings as our plan. Their seconds as multiples of ours: medians of ten
interleaved rounds with 95% intervals, predictions in brackets. A choice that is predicted slower than ours may run
faster, mostly where the difference is a few percent, once where it was a fifth (mlp, steps of a tenth of a second):
predictions of steps on such devices are 12% off in the median ([measured](measured.md)), and the counts vary from run
to run.
"""
EQUATIONS = """
## Time against equations

GPTs with unrolled layers on `data=8,model=8`. From the first line with a gap above 0 on, further rounds would take
longer than the plan is worth, and the certificate ends below one percent.

On steps of more than 8,000 nodes, repeated layers are detected (`meshdsl/planner/problem/layers.py`): runs of nodes
that repeat in the arguments, in the forward pass, in reverse in the backward pass, and in the optimizer. Layers that
agree in everything that costs depend on, shadow prices included, form one block (`meshdsl/planner/encoding/blocks.py`):
its network is built and reduced once, then instantiated as often as the layer occurs. Choices are not tied: every layer
keeps its own variables, and the bound covers all of them. Plans are searched on a *reduced-depth* step, which has six
of each run of layers; omitted layers copy the last one before them. To fit memory, individual layers may deviate, as
the knapsack above decides. For the bound, the variables of the full step receive the messages of their counterparts in
the reduced-depth step (`meshdsl/planner/encoding/reduced_depth.py`). Any messages give a valid bound, and variables
with equal tables and equal messages contribute equally, which is computed once (`meshdsl/planner/encoding/kernels.py`).
Only where values skip a layer, as an encoder's may, one pass over the full step follows. Signatures, work, costs and
reshards are computed once per class of equal operations; the memory of a plan takes a few passes over arrays laid out
once per program. GPT-3 and Llama 3 405B with every layer written out are in `bench/unrolled.py`, steps that are more
than one stack of layers (microbatches, encoder and decoder, adapters, time steps) in `bench/deep_steps.py`; their
figures are in [benchmarks](benchmarks.md).

![planning time against equations](planner-time.svg)
"""
AXES = """
## Time against axes

Axes of two devices each. From four axes on (three, for some models) there are too many joint states to enumerate: plans
come from neighbourhoods of two groups of axes, the bound from projections on parts of the axes wherever the joint
network (of the reduced-depth step, if there is one) exceeds 400 million entries. Under a binding memory limit, all axes
move at every price, in two groups, and in steps of up to 20,000 nodes every pair of axes moves by itself as well; the
bound then includes the price of bytes. Such steps are in [models](models.md) and [benchmarks](benchmarks.md).
"""
AGAIN = """
## Another pin

`sharded.with_pins(...)` replans under changed pins. It reuses the traced (and padded) program, all nodes of the
problem except those whose pins change, all tables of costs and reshards, the program text, and, where memory is short,
the binding program points and their price. It starts from the previous plan, passes fewer messages, and skips descent
and rounds. If memory was and remains short, one search at the known price is combined with the previous plans repaired
for the new pins; if the result costs over 1% more, the search starts over. A bound proved under fewer pins stays
valid, and is reused as long as the pins added since cost at most 1%, also when one of them changes; otherwise a new
one is proved, on more than two axes from projections. Steps of up to 600 nodes are searched from the previous plan as
thoroughly as a new one within memory, except for rounds. Steps in microbatches are planned from scratch. Figures are
in [benchmarks](benchmarks.md) (`python -m bench.planning`).
"""
OVERLAP = """
## With overlap

`md.parallelize(..., overlap=True)`, or `md.Program(..., overlap=True)` for the command line, chooses by
`plan.simulated_seconds`: a collective that can run beside independent computation costs only its exposed part, plus a
price for the hidden part, since hidden traffic still occupies the links (`meshdsl/api/overlap.py`). A few prices
are tried; of all plans found, the plan without overlap among them, the one with the shortest simulated step wins. So it
is never slower with overlap; executed sequentially it may be, and `plan.seconds`, `plan.lower_bound` and `plan.gap`
still refer to sequential execution: no bound on the simulated step is proved. Planning seconds include tracing here.
"""
SIZES = """
## Time against the sizes of axes

Llama 3 8B, 8,192 sequences, two axes: time depends on how many states divide evenly, not on the number of devices.
"""
