"""Helpers that know nothing of layouts or programs.

* ``arrays``: integer arrays: numbers for equal things, groups, ranges;
* ``jit``: the one decorator for compiled loops (numba), imported by ``*kernels.py`` files only;
* ``lazy``: values computed on first use, and results memoised by object;
* ``paths``: paths of arrays in a tree, and globs over them;
* ``runtime``: worker threads, the garbage collector, deadlines;
* ``stubs``: packages whose names are listed in a stub file and imported lazily;
* ``text``: numbers with units, tables, files.
"""
