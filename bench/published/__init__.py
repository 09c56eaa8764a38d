"""Predicted step times against published measurements: ``python -m bench.published`` writes docs/predictions.md.

One module per source of tables (``megatron``, ``mosaic``, ``dgxc``, ``maxtext``) turns rows into ``case.Case``;
``predict`` plans and times them, ``score`` and ``page`` evaluate. ``fit`` and ``links`` fit the presets of topologies.
"""
