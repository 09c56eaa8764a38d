"""Helpers that know nothing of layouts or programs.

* ``arrays``: integer arrays: numbers for equal things, groups, ranges;
* ``files``: reading regular files of a limited size, writing text files;
* ``html``: tables in notebooks;
* ``jit``: the one decorator for compiled loops (numba), imported by ``*kernels.py`` files only;
* ``lazy``: values computed on first use, and results memoised by object;
* ``paths``: paths of arrays in a tree, and globs over them;
* ``runtime``: worker threads, the garbage collector, deadlines;
* ``stubs``: packages whose names are listed in a stub file and imported lazily;
* ``terminal``: text as wide as the terminal, collectives in colours;
* ``text``: numbers with units, safe names, tables;
* ``version``: the version of the package.
"""
