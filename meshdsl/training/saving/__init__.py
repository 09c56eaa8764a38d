"""The state of a run on disk: saved in the background, verified when it is restored, in a folder that one run holds.

Modules in order:

    digests     digests of arrays that do not depend on layouts
    storage     folders and buckets: copies of files that grow, files that several processes replace, what errors mean
    checkpoint  saved states, which restore onto another mesh and plan (orbax)
    folder      the folder of a run, which one run holds at a time
"""
