"""What the sections of ``docs/planner.md`` say before their tables."""

INTRO = """# The planner, measured

Written by `make bench-planner`. A model of every family of `models/` on meshes of one, two and three axes, topology
`dgx-h100`, the batch split over `data`, everything else left open; memory is not limited. Seconds of planning are those
of the processor, after tracing, in a process that has planned something before; both threads count where there are two.

## How plans are proved

`plan.lower_bound` is proved for every plan: message passing (TRW-S) raises a bound on the network of all operations.
For steps of up to a few thousand operations, rounds follow (`meshdsl/planner/bounds/tighten.py`): states that no
better plan
can have go; where the readers of a value can still ask for few sets of layouts, the cheapest trees of moves to all
these sets stand in the network, exactly; the plans that messages point to are tried. A value that has paid too little
in such a plan gets larger tables in the next round, or where these would be too large, the pairs of its readers that
cost most there. The rounds end when nothing is left between plan and bound, when they help no more, or when a fixed
amount of work is done: work is counted in table entries, so the same step gets the same plan everywhere. A gap of 0
below means less than a hundred-millionth, for costs are summed in floats. For larger steps no states go, but values
that have paid too little, as weights that every microbatch reads, get larger tables as well, as long as more than half
a percent is open and that helps (`redrawn` in `raising.py`).

Where a gap of more than half a percent is left, other plans are looked for: most operations are decided anew, exactly,
while some that are drawn hold (`meshdsl/planner/search/local_search.py`), and the step is planned as if the mesh had
fewer
axes, so that more axes are not worse than fewer.

Of plans that cost the same, the one with the fewest collectives is taken, then the one with the fewest moves (both are
part of every cost), and on steps of up to 8,000 operations then one with fewer distinct layouts, as far as they
are found (`meshdsl/planner/search/tie_break.py`).

A plan that does not fit the memory is only where the search for one that does begins; it is not taken through rounds.
The points of the program where plans are too large get a price per byte, which is raised until a plan fits and, in
steps of up to 20,000 operations, lowered as far as one still does (`meshdsl/planner/memory/fit.py`). Then parts of
plans
that do not fit are taken over. Two plans come apart into parts that do not depend on each other (`parts.py`): each
saves something and needs memory, or leaves some, at the points that are fullest. Which ones to take is a knapsack
(`mix.py`, `knapsack.py`); where the plan that comes of it is too large at a point that was not looked at, that one is
as well. Where the limit costs much, operations are then decided anew while others hold (`redecided.py`), and steps of
up to 150 operations are gone through box by box until no cheaper plan can fit, or none at all (branch and bound,
`branching.py`): such a plan is proved, or the least memory possible is said. The bound knows of the limit then. While
an operation runs, memory holds in any case what it reads and writes, what fused operations read that run later, and
of every value that was made before and is read once more, some copy on the way there: so a gathered weight that is
kept for the backward pass pays, and so does gathering it again (`floor.py`, `kept.py`). So does one that three loops
of a pipeline read and that is kept while the second one reads another copy (`forks.py`). No plan that fits costs less
than the least of cost and priced bytes, less the price of the limit (`dual.py`; a Lagrangian). Known plans, whether
they fit or not, say at which price that is highest. Of a step of more than 8,000 operations that is begun beside the
mixing of plans, at the price that is known by then, and done again if what is found says another one; the bound of
any step is proved while its plan is written down.
"""
GAPS = """
![gaps](planner-gaps.svg)
"""
CHECK = """
## Checked by another solver

The whole problem on one axis as an integer program (`tests/planner/integer.py`), without our networks, eliminations and
messages: a binary per operation and joint signature, a flow per reader of a value, an arc that is paid once. HiGHS
solves it. Cost and bound are parts of our plan's cost; smaller steps are compared in the tests, on two axes as well.
"""
PEERS = """
## Against how others choose

Each on our tables of costs and moves, evaluated as ours (`bench/planner/peers.py`); what differs is the choice alone.

* **greedy**: operations in program order take the signature that is cheapest with its operands as they lie (the rule of
  OneFlow's compiler); arguments that nothing is said of are the same everywhere, and so are constants if
  that is better.
* **one name, one axis**: every name of a dim is split over one axis or none wherever it occurs (Mesh-TensorFlow's
  `auto_mtf`); of the names of most bytes, all assignments are tried.
* **axis by axis**: an integer program per mesh axis, the axes before it fixed, in which every reader pays for its own
  move (after Alpa's solver, which has no sharing).

Predicted time of theirs as a multiple of ours, and what one device sends.
"""
STEPS = """
## Run beside how others choose

The same choices at small sizes (those of `bench/memory.py`) on 8 virtual CPU devices, `data=4,model=2`, the batch split
over `data`, costs measured by `calibrate` in the same process (`bench/planner/steps.py`). The XLA partitioner (Shardy)
takes and leaves everything where our plan does. Seconds of theirs as multiples of ours, medians of ten interleaved
rounds with 95% intervals; in brackets what is predicted. A choice that is predicted longer than ours may run shorter,
most often where that is a few per cent, once where it was a fifth (mlp, steps of a tenth of a second): what is
predicted of steps on such devices is 12% off in the median (`docs/measured.md`), and other runs come to other counts.
"""
EQUATIONS = """
## Time against equations

GPTs with unrolled layers on `data=8,model=8`. From the line with a gap above 0 on, rounds would take longer than the
plan is worth, and the certificate ends below one percent.

In steps of more than 8,000 nodes equal layers are found (`meshdsl/planner/problem/layers.py`): runs of nodes that
repeat in
the arguments, the forward pass, backwards in the backward pass, and in the optimizer. Layers that are equal in all
that costs depend on, prices of memory included, are one block (`blocks.py`): its network is made and reduced once,
and put together as often as it occurs. Choices are not tied: every layer keeps its variables, and the bound speaks of
all of them. A *shorter* step has six of many layers in a row. Plans are searched on that one, and the layers that it
leaves out do as the last one before them does. So that all fits the memory, some layers may do otherwise: the
knapsack above says which. For the bound, the variables of the whole step hear the messages of those that they are
like in the shorter one (`shorter.py`). Any messages prove something, and variables that have the same tables and hear
the same prove the same: that is worked out once (`alike.py`). Only where values skip a layer, as those of an encoder
may, one pass over the whole step follows. What operations of one kind have in common (signatures, work, costs,
reshards) is found once; memory of a plan is a few passes over arrays that are laid out once per program. GPT-3 and
Llama 3 405B with every layer written out are in `bench/unrolled.py`, steps that are more than one stack of layers
(microbatches, an encoder and a decoder, adapters, time steps) in `bench/varied.py`; their figures are in the README.

![planning time against equations](planner-time.svg)
"""
AXES = """
## Time against axes

Axes of two devices each. From four axes on (three, for some models), joint states are too many to be looked at
together: the plan comes from neighbourhoods of two groups of axes, the bound from parts of the axes where the joint
network, that of a shorter step if there is one, has more than 400 million entries. Where memory is short, all axes move
at every price, in two groups, and in steps of up to 20,000 nodes every two of them by themselves as well; the bound has
a price of bytes, too. Such steps are in `docs/models.md` and in the README.
"""
AGAIN = """
## Another pin

`sharded.with_pins(...)` plans again under other pins. What it keeps: the traced (and padded) program, the nodes of the
problem but for those whose pins change, all tables of costs and moves, the text of the program, and, where memory is
short, the points that bind and their price. It begins from the plan before, passes fewer messages, and leaves out
sweeps and rounds. Where memory was short and is, one search at that price is mixed with what the plans before become
under the new pins; if that costs more than 1%, all is searched again. The bound of a plan under fewer pins holds, and
is taken over where those that came since cost 1% at most, also when one of them changes; else one is proved, on more
than two axes from parts of the axes. Steps of up to 600 nodes are searched from the plan before on as thoroughly as a
new one within the memory is, but for rounds. Steps in microbatches are planned anew. Figures are in the README
(`python -m bench.planning`).
"""
OVERLAP = """
## With overlap

`md.parallelize(..., overlap=True)`, or `md.Program(..., overlap=True)` for the command line, chooses by
`plan.simulated_seconds`: a collective that can run beside independent computing costs what sticks out of it, and a
price for the rest, since links are busy with what is hidden, too (`meshdsl/api/overlap.py`). A few prices are
tried;
of all plans found the one with the shortest simulated step is taken, the one without overlap among them. So it is
never slower with overlap; one thing after the other it may be, and `plan.seconds`, `plan.lower_bound` and `plan.gap`
still speak of that: how good the simulated step is at most is not proved. Seconds of planning are with tracing here.
"""
SIZES = """
## Time against the sizes of axes

Llama 3 8B, 8,192 sequences, two axes: time follows how many states divide, not how many devices there are.
"""
