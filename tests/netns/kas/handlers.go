package kas

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// Event is one event of a watch.
type Event struct {
	Type   string `json:"type"`
	Object struct {
		Kind       string `json:"kind"`
		APIVersion string `json:"apiVersion"`
		Metadata   struct {
			Name            string `json:"name"`
			ResourceVersion string `json:"resourceVersion"`
		} `json:"metadata"`
	} `json:"object"`
}

// watch sends an event at once and one per interval.
func (s *Server) watch(w http.ResponseWriter, r *http.Request) {
	count, interval := 0, s.interval
	for name, parse := range map[string]func(string) error{
		"count":    func(v string) (err error) { count, err = strconv.Atoi(v); return err },
		"interval": func(v string) (err error) { interval, err = time.ParseDuration(v); return err },
	} {
		if v := r.URL.Query().Get(name); v != "" {
			if err := parse(v); err != nil || interval <= 0 {
				http.Error(w, name+": "+v, http.StatusBadRequest)
				return
			}
		}
	}
	w.Header().Set("Content-Type", "application/json")
	tick := time.NewTicker(interval)
	defer tick.Stop()
	out, flush := json.NewEncoder(w), http.NewResponseController(w)
	for i := 1; ; i++ {
		e := Event{Type: "ADDED"}
		e.Object.Kind, e.Object.APIVersion = "ConfigMap", "v1"
		e.Object.Metadata.Name, e.Object.Metadata.ResourceVersion = fmt.Sprintf("event-%d", i), strconv.Itoa(i)
		if out.Encode(e) != nil || flush.Flush() != nil || i == count {
			return
		}
		select {
		case <-tick.C:
		case <-r.Context().Done():
			return
		}
	}
}

// shaTrailer holds the hex SHA-256 of a body.
const shaTrailer = "X-Sha256"

func sendBytes(w http.ResponseWriter, r *http.Request) {
	n, err := strconv.ParseInt(r.URL.Query().Get("n"), 10, 64)
	if err != nil || n < 0 {
		http.Error(w, "n: want a number of bytes", http.StatusBadRequest)
		return
	}
	w.Header().Set("Trailer", shaTrailer)
	w.Header().Set("Content-Type", "application/octet-stream")
	sum := sha256.New()
	if _, err := io.CopyN(io.MultiWriter(w, sum), noise(), n); err != nil {
		panic(http.ErrAbortHandler) // the client must not take it for the whole
	}
	w.Header().Set(shaTrailer, hex.EncodeToString(sum.Sum(nil)))
}

// noise is bytes in which a loss, a repetition or an exchange shows.
func noise() io.Reader { return rand.NewChaCha8([32]byte{}) }

// Received is the answer of /sink.
type Received struct {
	Bytes  int64  `json:"bytes"`
	SHA256 string `json:"sha256"`
}

func sink(w http.ResponseWriter, r *http.Request) {
	sum := sha256.New()
	n, err := io.Copy(sum, r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(Received{n, hex.EncodeToString(sum.Sum(nil))})
}

// exec switches protocols and echoes.
func (s *Server) exec(w http.ResponseWriter, r *http.Request) {
	protocol := r.Header.Get("Upgrade")
	if protocol == "" || !strings.EqualFold(r.Header.Get("Connection"), "Upgrade") {
		http.Error(w, "you must specify at least 1 of stdin, stdout, stderr, and Upgrade", http.StatusBadRequest)
		return
	}
	conn, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil { // HTTP/2 knows no Upgrade
		http.Error(w, err.Error(), http.StatusHTTPVersionNotSupported)
		return
	}
	s.mu.Lock()
	if s.upgraded == nil {
		s.mu.Unlock()
		conn.Close()
		return
	}
	s.upgraded[conn] = true
	s.wg.Add(1)
	s.mu.Unlock()
	defer func() {
		conn.Close()
		s.mu.Lock()
		delete(s.upgraded, conn)
		s.mu.Unlock()
		s.wg.Done()
	}()
	if _, err := fmt.Fprintf(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", protocol); err == nil {
		echo(conn, buffered.Reader)
	}
}

// echo returns what comes and, after the client has ended its direction, says
// how much that was and ends the other.
func echo(conn net.Conn, in *bufio.Reader) {
	n, err := io.Copy(conn, in)
	if err != nil {
		return
	}
	if _, err := fmt.Fprintf(conn, farewell, n); err != nil {
		return
	}
	if half, ok := conn.(interface{ CloseWrite() error }); ok {
		_ = half.CloseWrite()
	}
}

// farewell ends an echo.
const farewell = "end %d\n"
