// Command intercept measures what diverting costs: for every mode, in paired
// and interleaved rounds on one machine, connects that are not diverted,
// connects that are, round trips, throughput and refused connects, each beside
// the same with nothing installed.
//
// Three processes take part: this one, a holder in the node's namespace, which
// has the mode and the listeners, and clients on the node and in a pod, which
// time system calls.
package main
