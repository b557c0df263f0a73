"""What a run tells the world: records, its folder on disk, tables and summaries; the one reader of results."""
