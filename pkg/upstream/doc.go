// Package upstream says WHICH kube-apiserver is dialled: pools of equivalent
// addresses with their health, and the set of them that a server has.
package upstream
