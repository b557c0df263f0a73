"""The paper, cell by cell: its settings and printed figures as data, and what turns them into tables.

Read in this order: `paper.toml` (every setting of every cell), `cells` and `blocks` (from that file to runs),
`reproduction` (from runs to folders on disk), `measures` and `exported` (from folders to figures), `comparison` (ours
beside the paper's), `tables`, `figures`, `results_page`.
"""
