"""The five papers: their tables and studies, ours beside theirs, behind `sordino papers`."""
