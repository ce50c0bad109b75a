"""The prefix cache on disk: pages and recurrent states that survive the end of the process."""
