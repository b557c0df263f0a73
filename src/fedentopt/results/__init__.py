"""What a run tells the world: records, its folder on disk, tables and summaries, statistics; the one reader of results."""
