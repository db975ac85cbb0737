"""Plans changes of groups as moves: what a move may do, which is next, what a schedule asks for.

A group is a set of prefill and decode instances that together serve one scenario, a kind of
requests. A move changes one group or two.
"""
