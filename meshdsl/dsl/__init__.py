"""The DSL: tensors with named dims over ordinary arrays.

dims.py         names and sizes, as text and as a value
array.py        the tensor, and how operands meet by name      order.py: in which order
operands.py     names given to arrays; dims found in operands
elementwise.py, reduce.py, contract.py, shape.py, index.py, make.py, random.py, running.py, window.py, loops.py
                the operations
blame.py        what errors call the operands, and the user's line
"""
