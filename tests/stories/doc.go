// Package stories tells what Kasway is for, end to end: the real binaries in
// network namespaces, and what clients on the node see of them on good and bad
// days.
package stories
