// Package kas is a stand-in for a kube-apiserver: what matters on the way to
// it, and none of its API. It serves HTTPS (HTTP/1.1 and HTTP/2) with a
// certificate of its own authority:
//
//	/version /readyz           as the real one
//	/whoami                    the client's address as the server sees it
//	/api/v1/watch              a chunked watch, an event per interval, until the
//	                           client leaves (count=N ends it, interval=1s)
//	/api/v1/…/exec             Upgrade as kubectl exec makes it: 101, then an
//	                           echo whose end says how much was seen
//	/bytes?n=N                 N bytes with their SHA-256 as a trailer
//	/sink                      reads a body, answers its length and SHA-256
//
// With curl:
//
//	curl --cacert ca.pem https://10.96.0.1/version
//	curl --cacert ca.pem -N https://10.96.0.1/api/v1/watch
//	curl --cacert ca.pem -T file https://10.96.0.1/sink
package kas
