"""What a run tells the world: records, its folder on disk, tables, summaries, statistics; the one reader of results."""
