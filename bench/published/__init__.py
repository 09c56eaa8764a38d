"""Predicted and published step times: ``python -m bench.published`` writes docs/evidence/predictions.md.

One module per source of tables (``megatron``, ``mosaic``, ``dgxc``, ``maxtext``) turns rows into ``case.Case``;
``predict`` plans and times them, ``score`` and ``page`` evaluate. ``fit`` and ``links`` fit the presets of topologies.
"""
