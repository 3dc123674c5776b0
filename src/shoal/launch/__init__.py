"""Starting the ranks of a job."""
