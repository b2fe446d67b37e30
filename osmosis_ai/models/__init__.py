"""The models a run can ask. `engines` lists the ways to ask one; importing this package loads none of them."""
