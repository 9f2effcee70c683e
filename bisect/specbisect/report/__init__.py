"""Reports: an issue that can be checked without this tool, programs that show what was found, and pages to look at."""
