"""Data sets: from official files to uint8 arrays.

`load` gives a `Dataset` by name or path, `from_arrays` one of arrays in memory. Official files are read from the data
folder, checked, converted once to memory-mapped arrays, and checked against what was converted at every later load.
"""

from __future__ import annotations

from fedentopt.datasets.arrays import from_arrays
from fedentopt.datasets.catalog import resolve_data_dir
from fedentopt.datasets.dataset import Dataset
from fedentopt.datasets.loading import default_image_size, load

__all__ = ["Dataset", "default_image_size", "from_arrays", "load", "resolve_data_dir"]
