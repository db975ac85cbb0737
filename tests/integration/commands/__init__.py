"""`pdmesh` as people use it: each command in a process of its own, on a real mesh on sim."""
