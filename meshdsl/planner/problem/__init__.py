"""The planning problem as arrays: variables, domains and costs of a program on a mesh, under pins.

    minimise   sum over nodes of trips * seconds(node in its state)
             + sum over values of trips * seconds(cheapest resharding tree from the producer's layout to all consumers')
    subject to pins, divisibility, and the memory limit at every program point

A *node* is a variable: an operation, an input, an output, or a link that ties a loop's body to its surroundings. Its
*state* is a joint signature, one row of its table per mesh axis. A *port* is one of its tensors. Pins restrict domains
(node consistency, in terms of constraint satisfaction), and partial placements that no producer can supply are pruned
by a dataflow analysis. Nodes of equal operations share their arrays, and repeated layers are found, so a model of a
hundred equal layers has the tables of one.

Modules in order:

* ``variables``: nodes, their ports and rows; equivalence classes of equal operations and nodes; links of loops;
* ``ports``: the incidence of ports and values, and the layouts of all ports in a plan;
* ``build``: from program and pins to a ``Problem``;
* ``layers``: repeated layers, found as runs of equal nodes;
* ``model``: ``Model``, everything a search reads: tables, pin masks, reshard costs, prices of memory, restricted views.
"""
