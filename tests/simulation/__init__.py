"""Simulated networks and groups, and chaos: what the protocols are tried with, beside ordinary tests.

simulation, simulated_worker, invariants
                reference stores of production without threads or sockets, each step chosen by a schedule, and what must
                hold after each
random_schedules, simulate
                random schedules for them; `make simulate`
exploration, explored_worker, explore
                every state of the reference counts within a bound; `make explore`
forgeries, illegal_events
                what must have no effect, in whatever state
reference_state, schedules
                what these share
simulated_group, group
                membership of up to 1,000 workers in virtual time; `make simulate-group`
chaos, chaos_child, chaos_worker, chaos_verdict
                a group of real processes that are killed, stopped, cut off and replaced; `make chaos`
planted_bugs, planted_membership_bugs, membership_scenarios
                known mistakes that the simulators must find, and where to look for them
"""
