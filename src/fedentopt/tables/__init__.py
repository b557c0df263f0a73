"""Tables as people have them: label counts, a label prior, a list of who is available. NumPy only.

`read_counts` takes CSV of any usual kind, Excel and Parquet; see `counts` for the forms.
"""

from fedentopt.tables.counts import CountsFile, counts_lines, read_counts
from fedentopt.tables.lists import read_available, read_target

__all__ = ["CountsFile", "counts_lines", "read_available", "read_counts", "read_target"]
